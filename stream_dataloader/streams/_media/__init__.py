"""What streams of media files share. Open `section` first; `_media` imports nothing of the package but `errors`."""
