"""HTML reports (`report`) and the plots in them (`plots`)."""
