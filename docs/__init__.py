"""The documents, and how they become a site and a notebook."""
