"""Accelerators: what torch reports inside a rank (accelerator), and NVIDIA's driver from outside (gpu_state)."""
