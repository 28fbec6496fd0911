"""Reports of a run for people: loss curve as text and PNG, closing screen of a job, HTML page.

figures = gather_figures(stream_entries(run_folder))
print(closing_screen(summary, run_folder, text_curve(*figures.losses), sample="..."))
write_page(run_folder, figures, summary)
"""

from raystride.pipelines.observability.report.closing import closing_screen
from raystride.pipelines.observability.report.curve import save_curve_picture, text_curve
from raystride.pipelines.observability.report.figures import gather_figures
from raystride.pipelines.observability.report.page import write_page

__all__ = ["closing_screen", "gather_figures", "save_curve_picture", "text_curve", "write_page"]
