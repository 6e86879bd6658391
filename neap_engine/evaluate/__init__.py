"""Answers prompts in several ways, neap's and others', and compares quality and speed: the measuring process of
`neap evaluate` and `neap tune`."""
