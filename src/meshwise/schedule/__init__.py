"""What each rank does, as data: actions, schedules and their replay."""
