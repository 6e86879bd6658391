"""What a start of a service remembers for the next one: docs/decisions/020.

key      what an entry depends on: the model's content, this build, this machine
facts    what was proven and measured, by name
store    the folder of all entries: bounded, checked, shared by processes
packed   matrices packed for the kernels, in a file that is mapped
"""
