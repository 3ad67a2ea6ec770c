"""HTML reports (`report`), the plots in them (`plots`), and the curves of a training run (`curves`)."""
