"""Real training runs on jzero, one folder each. They import jzero; nothing imports them."""
