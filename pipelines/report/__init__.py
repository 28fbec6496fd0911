"""What a person sees of a run: its loss curve in the terminal and as a picture, a job's closing screen, the run's page.

points, validation = loss_points(read_entries(run_folder))
print(text_curve(points, validation))
print(closing_screen(summary, run_folder, text_curve(points, validation), sample="..."))
"""

from raystride.pipelines.report.closing import closing_screen
from raystride.pipelines.report.curve import curve_picture, loss_points, text_curve
from raystride.pipelines.report.page import write_page

__all__ = ["closing_screen", "curve_picture", "loss_points", "text_curve", "write_page"]
