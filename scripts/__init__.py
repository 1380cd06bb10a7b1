"""Programs that build documentation, dashboards, environments and locks."""
