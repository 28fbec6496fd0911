"""What a person sees of a run: its loss curve in the terminal and as a picture, a job's closing screen, the run's page.

figures = gather_figures(stream_entries(run_folder))
print(closing_screen(summary, run_folder, text_curve(*figures.losses), sample="..."))
write_page(run_folder, figures, summary)
"""

from raystride.pipelines.report.closing import closing_screen
from raystride.pipelines.report.curve import curve_picture, text_curve
from raystride.pipelines.report.figures import gather_figures
from raystride.pipelines.report.page import write_page

__all__ = ["closing_screen", "curve_picture", "gather_figures", "text_curve", "write_page"]
