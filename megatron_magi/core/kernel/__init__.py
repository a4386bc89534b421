"""L3: attention over slices on one device."""
