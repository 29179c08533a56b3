"""What Numba compiles, at first use and cached. Arrays and addresses only: nothing in here imports torch."""
