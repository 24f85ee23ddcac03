"""What all other folders use: offsets, devices, checks of arguments, autocast."""
