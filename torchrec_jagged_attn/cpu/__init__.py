"""What runs on a CPU: plain PyTorch, and attention in C++ where that can be built."""
