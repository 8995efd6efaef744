"""The engine: requests wait, take a row and its pages, are prefilled, decode on the device, and leave."""
