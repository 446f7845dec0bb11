"""Many requests at once: slots, pages, admission and the thread that owns the device."""
