"""Plain PyTorch: weights in one file or several, and the state dict of one optimizer beside them."""
