"""What is known of a trained ladder: held-out figures, and how often answers by the policy relaxed differ."""
