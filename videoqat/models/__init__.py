"""Model families behind one seam (`spec`), attention recipes put into them (`install`), and a tiny pipeline to try them on (`tiny`)."""
