"""Observing a run: metrics, status, progress, trajectories.

metrics       an event -> `measure` -> the recorder of `metrics`, with the names of `metrics_table` -> every 1 to 4 s
              `actors.observe.reporting` pushes a snapshot -> `hub` merges the actors' snapshots -> `/metrics`
status        reports of the driver and the buffer -> `hub` -> the document of `status` -> `/status`; shown by
              `status_page.html` in a browser, by `status` and `status_view` in a terminal (`baton status`)
progress      a line per optimizer step -> `metrics.jsonl`, `trackers`, the curve of `plot`; `summary` at the end;
              `metrics_table` lists the keys of a line
trajectories  a sample of the trajectories for people: on a terminal, on an HTML page
alerts        `metrics` exports thresholds as gauges, which `deploy/prometheus/rules.yaml` compares to metrics
"""
