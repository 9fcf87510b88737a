"""``daf bench peers``: DAF beside everything else that a user could do."""
