"""Pictures and tables that nodes show."""
