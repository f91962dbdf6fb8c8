"""How exporters write attention: one recogniser a form, one description of what was found."""
