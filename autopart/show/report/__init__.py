"""The report: plans as one HTML page that needs no network, with charts drawn by the embedded library ECharts.

`report_data` collects what the page shows as JSON, `suggestions` the changes with predicted gains. The files in
`assets/` draw it.
"""
