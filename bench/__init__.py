"""What the kernels cost and what they take: ``python -m bench kernels``. Nothing imports this package."""
