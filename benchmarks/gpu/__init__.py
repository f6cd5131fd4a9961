"""What is to be measured on a GPU. `scripts/gpu_check.sh` runs it."""
