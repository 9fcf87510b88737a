"""Values of packages that may not import each other: no torch, no devices, nothing else of DAF."""
