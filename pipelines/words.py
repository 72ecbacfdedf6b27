"""How times are said to a person."""


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42s, 3m05s, 2h10m."""
    if seconds != seconds or seconds == float("inf"):
        return "unknown"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
