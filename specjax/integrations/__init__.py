"""specjax inside of other systems. Each module needs an extra."""
