"""What the model reads: given text, text that the model writes itself, and the splits that each sequence is assigned
to."""
