"""What the families of kernels share. It imports none of them."""
