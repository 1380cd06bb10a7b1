"""The Grafana dashboards and their panels."""
