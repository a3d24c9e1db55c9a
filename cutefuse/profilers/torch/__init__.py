"""What `cutefuse profile-torch` does: inputs.py makes a module and what it is given, measure.py profiles it, events.py
holds what the profiler recorded, sums.py adds it up, spots.py finds what our operators would take, tables.py prints."""
