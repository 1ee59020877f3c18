"""What measurements are kept and shown as: cells, tables, pictures, and the cells of others."""
