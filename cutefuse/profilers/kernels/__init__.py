"""What `cutefuse profile-kernels` does: metrics.py names what is measured, ncu.py and nsys.py run NVIDIA's profilers by
program.py, cases.py launches our operators, engines.py and layers.py follow an engine's layers, contention.py adds
another load, drive.py is what runs in the child processes."""
