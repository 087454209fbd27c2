"""One acceleration a file, behind the contract of accel/technique.py."""
