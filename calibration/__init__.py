"""The recorded times that constants were fitted to, the scripts that fit them again, and the report on both."""
