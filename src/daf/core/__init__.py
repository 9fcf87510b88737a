"""Values shared by packages that may not import each other: no torch, no devices."""
