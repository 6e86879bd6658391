"""What is known of a trained ladder: held-out figures, and the certified risk of the policy relaxed."""
