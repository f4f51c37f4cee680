"""Report of plans as one HTML page that needs no network, with charts by the embedded ECharts.

`report_data` collects the data of the page as JSON. `suggestions` adds changes of the plan with their predicted gains.
The files in `assets/` draw the page.
"""
