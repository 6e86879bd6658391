module neap-example

go 1.18
