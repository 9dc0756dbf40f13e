"""Measured choices as data, with the device and the date they were measured on."""
