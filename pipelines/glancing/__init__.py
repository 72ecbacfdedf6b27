"""What `eyas glance` is made of: places, formats, rows, fields, health, findings, the screen."""
