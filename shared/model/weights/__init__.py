"""From a checkpoint's files to weights in memory, matrix by matrix and in the checkpoint's own number format.

files           reads parts of a file into memory of their own, and notices if the file changes
safetensors_file, gguf_file    the tables of contents of the two kinds of files
stored          a matrix that is still in a file, or packed for the kernels
lazy            a parameter of a model that stands for such a matrix
reading         lets transformers build a model whose matrices stay in their files
groups          matrices that AWQ or GPTQ has quantised
quantised       checkpoints that transformers loads into modules of other packages
"""
