"""What is learned: the draft vocabulary, exit heads, tables and confidence heads."""
