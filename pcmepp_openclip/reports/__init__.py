"""HTML reports and the plots in them."""
