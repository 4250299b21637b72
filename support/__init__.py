"""What makes the method run: networks and data from settings, files, optimisers, processes."""
