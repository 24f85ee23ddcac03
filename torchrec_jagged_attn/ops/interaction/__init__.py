"""Products, softmax and elementwise ops of jagged tensors."""
