"""The release of a rank's GPU memory for engines that share the GPU."""
