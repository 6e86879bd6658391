"""What is learned from the text: the full model's choices and the hidden states at the depths of the exits."""
