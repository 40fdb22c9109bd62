"""Stand-ins for parts of FastDecode in tests."""
