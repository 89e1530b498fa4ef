"""Facts about methods of sequence-parallel attention: one file a method, and the catalog that lists them. No torch here."""
