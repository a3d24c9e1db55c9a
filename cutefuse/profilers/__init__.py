"""What the commands `profile-kernels` and `profile-torch` do."""
