"""The page that shows a run: report.html in its folder."""
